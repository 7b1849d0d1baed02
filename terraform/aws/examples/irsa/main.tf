# vLLM reads by an IAM role for its service account, objects encrypted with a key of one's own.
provider "aws" {
  region = "eu-central-1"
}

module "weights" {
  source = "../.."

  bucket           = var.bucket
  prefixes         = ["org/llama-3-70b"]
  kms_key_arn      = var.kms_key_arn
  stored_checksums = true
  irsa             = [{ oidc_provider_arn = var.oidc_provider_arn, namespace = "inference", service_account = "s3stream" }]
}
