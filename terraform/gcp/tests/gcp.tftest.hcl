# The provider is a mock: what it would compute is made up, so these tests assert on what the module itself says.
mock_provider "google" {
  mock_data "google_project" {
    defaults = { number = "123456789012" }
  }
}

variables {
  project_id = "example-project"
  bucket     = "example-weights"
  location   = "europe-west4"
  prefixes   = ["org/llama"]
}

run "bucket_is_private_and_keeps_versions" {
  assert {
    condition     = google_storage_bucket.weights.public_access_prevention == "enforced" && google_storage_bucket.weights.uniform_bucket_level_access
    error_message = "The bucket must not be public, by whatever way."
  }
  assert {
    condition     = google_storage_bucket.weights.versioning[0].enabled && !google_storage_bucket.weights.force_destroy
    error_message = "Replaced checkpoints must stay."
  }
  assert {
    condition     = length(google_storage_bucket.weights.encryption) == 0 && length(google_storage_bucket.weights.logging) == 0
    error_message = "Keys and logs of one's own are options."
  }
  assert {
    condition     = output.urls == ["gs://example-weights/org/llama/"]
    error_message = "A URL ends in a slash, as a managed folder's name does."
  }
}

run "readers_are_bound_to_their_folder" {
  variables {
    prefixes = ["org/llama", "org/qwen"]
    readers  = [{ namespace = "inference", service_account = "s3stream" }]
  }
  assert {
    condition     = length(google_storage_managed_folder_iam_member.readers) == 2
    error_message = "Each reader may read each folder."
  }
  assert {
    condition     = google_storage_managed_folder_iam_member.readers["org/llama inference/s3stream"].member == "principal://iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/example-project.svc.id.goog/subject/ns/inference/sa/s3stream"
    error_message = "The member must be one service account of one namespace."
  }
  assert {
    condition     = google_storage_managed_folder_iam_member.readers["org/llama inference/s3stream"].managed_folder == "org/llama/" && google_storage_managed_folder_iam_member.readers["org/llama inference/s3stream"].role == "roles/storage.objectViewer"
    error_message = "The role must be the viewer's, on the folder and not on the bucket."
  }
}

run "own_key_and_logs" {
  variables {
    kms_key_name = "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k"
    log_bucket   = "logs"
  }
  assert {
    condition     = google_storage_bucket.weights.encryption[0].default_kms_key_name == var.kms_key_name && google_storage_bucket.weights.logging[0].log_bucket == "logs"
    error_message = "Both must reach the bucket."
  }
}

run "refuses_slashes_at_the_end" {
  command = plan

  variables {
    prefixes = ["org/llama/"]
  }
  expect_failures = [var.prefixes]
}

run "refuses_wildcard_readers" {
  command = plan

  variables {
    readers = [{ namespace = "*", service_account = "s3stream" }]
  }
  expect_failures = [var.readers]
}

run "refuses_versions_of_keys" {
  command = plan

  variables {
    kms_key_name = "projects/p/locations/l/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1"
  }
  expect_failures = [var.kms_key_name]
}
