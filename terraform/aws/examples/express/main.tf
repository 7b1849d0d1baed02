# A directory bucket in the zone of the GPUs, filled from the bucket that keeps the checkpoints.
provider "aws" {
  region = "us-east-1"
}

module "weights" {
  source = "../.."

  bucket          = var.bucket
  create_bucket   = false
  prefixes        = ["org/llama-3-70b"]
  express_zone_id = "use1-az4"
  pod_identities  = [{ cluster_name = "inference", namespace = "inference", service_account = "s3stream" }]
}
