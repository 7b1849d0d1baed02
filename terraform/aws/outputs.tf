output "urls" {
  description = "What to give s3stream, one URL for each folder."
  value       = module.policy.urls
}

output "role_arn" {
  description = "Role of the reader; null when nobody was named that could take it."
  value       = one(aws_iam_role.reader[*].arn)
}

output "reader_policy_arn" {
  description = "Policy for readers, to attach to roles of your own."
  value       = aws_iam_policy.reader.arn
}

output "publisher_policy_arn" {
  description = "Policy for whoever uploads checkpoints, to attach to roles of your own. It is attached to none here."
  value       = aws_iam_policy.publisher.arn
}

output "service_account_annotations" {
  description = "Annotations that service accounts need for IRSA. Pod Identity needs none."
  value       = tomap(length(var.irsa) == 0 ? {} : { "eks.amazonaws.com/role-arn" = aws_iam_role.reader[0].arn })
}

output "express_url" {
  description = "URL of the directory bucket; null when there is none. Pods belong into its zone: topology.k8s.aws/zone-id."
  value       = local.express_bucket == null ? null : "s3://${local.express_bucket}/"
}
