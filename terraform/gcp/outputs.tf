output "urls" {
  description = "What to give s3stream, one URL for each folder."
  value       = [for prefix in var.prefixes : "gs://${google_storage_bucket.weights.name}/${prefix}/"]
}

output "service_account_annotations" {
  description = "Annotations that service accounts need: none, since they are bound directly."
  value       = tomap({})
}
