output "urls" {
  description = "What to give s3stream."
  value       = module.weights.urls
}
