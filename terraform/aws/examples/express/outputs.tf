output "express_url" {
  description = "What to give s3stream, followed by the folder."
  value       = module.weights.express_url
}
