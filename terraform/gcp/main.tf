data "google_project" "current" {
  project_id = var.project_id
}

locals {
  pool = "principal://iam.googleapis.com/projects/${data.google_project.current.number}/locations/global/workloadIdentityPools/${var.project_id}.svc.id.goog"
  # Each reader may read each folder; bound directly, so there is no Google service account and no key.
  bindings = {
    for pair in setproduct(var.prefixes, var.readers) : "${pair[0]} ${pair[1].namespace}/${pair[1].service_account}" => {
      prefix = pair[0]
      member = "${local.pool}/subject/ns/${pair[1].namespace}/sa/${pair[1].service_account}"
    }
  }
}

resource "google_storage_bucket" "weights" {
  #checkov:skip=CKV_GCP_62:Access logs are an option, log_bucket, because they need a bucket of their own.
  project                     = var.project_id
  name                        = var.bucket
  location                    = var.location
  uniform_bucket_level_access = true # managed folders need it
  public_access_prevention    = "enforced"
  force_destroy               = false
  labels                      = var.labels

  versioning {
    enabled = true
  }

  soft_delete_policy {
    retention_duration_seconds = 604800 # seven days, after the versions are gone too
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      days_since_noncurrent_time = var.noncurrent_days
      with_state                 = "ARCHIVED"
    }
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 7
    }
  }

  dynamic "encryption" {
    for_each = var.kms_key_name == null ? [] : [var.kms_key_name]

    content {
      default_kms_key_name = encryption.value
    }
  }

  dynamic "logging" {
    for_each = var.log_bucket == null ? [] : [var.log_bucket]

    content {
      log_bucket        = logging.value
      log_object_prefix = var.bucket
    }
  }
}

resource "google_storage_managed_folder" "models" {
  for_each = toset(var.prefixes)

  bucket        = google_storage_bucket.weights.name
  name          = "${each.value}/"
  force_destroy = false
}

resource "google_storage_managed_folder_iam_member" "readers" {
  for_each = local.bindings

  bucket         = google_storage_bucket.weights.name
  managed_folder = google_storage_managed_folder.models[each.value.prefix].name
  role           = "roles/storage.objectViewer" # get and list objects; nothing of the bucket itself
  member         = each.value.member
}
