# vLLM on GKE reads one model as its own service account.
provider "google" {
  project = var.project_id
}

module "weights" {
  source = "../.."

  project_id = var.project_id
  bucket     = var.bucket
  location   = "europe-west4"
  prefixes   = ["org/llama-3-70b"]
  readers    = [{ namespace = "inference", service_account = "s3stream" }]
}
