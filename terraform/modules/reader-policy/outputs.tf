output "reader_json" {
  description = "Policy that lets s3stream list and read the folders, and nothing else."
  value       = jsonencode(local.reader)
}

output "publisher_json" {
  description = "Policy for whoever uploads checkpoints and runs `s3stream verify --write`: the reader's, and writing. It deletes nothing."
  value       = jsonencode(local.publisher)
}

output "urls" {
  description = "What to give s3stream, one URL for each folder."
  value       = [for prefix in var.prefixes : "s3://${var.bucket}/${prefix}/"]
}
