# vLLM in the cluster "inference" reads two models by EKS Pod Identity, through a gateway endpoint.
provider "aws" {
  region = "eu-central-1"
}

module "weights" {
  source = "../.."

  bucket         = var.bucket
  prefixes       = ["org/llama-3-70b", "org/qwen3"]
  pod_identities = [{ cluster_name = "inference", namespace = "inference", service_account = "s3stream" }]

  gateway_endpoint = {
    vpc_id          = var.vpc_id
    route_table_ids = var.route_table_ids
  }
}
