output "urls" {
  description = "What to give s3stream."
  value       = module.weights.urls
}

output "service_account_annotations" {
  description = "For examples/kubernetes/overlays/eks-irsa."
  value       = module.weights.service_account_annotations
}
