variable "bucket" {
  description = "Name of the bucket to make."
  type        = string
}

variable "kms_key_arn" {
  description = "Key of SSE-KMS."
  type        = string
}

variable "oidc_provider_arn" {
  description = "ARN of the cluster's OIDC provider."
  type        = string
}
