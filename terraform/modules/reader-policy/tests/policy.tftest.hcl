variables {
  bucket   = "example-weights"
  prefixes = ["org/llama"]
}

run "reads_its_folder_and_no_other" {
  command = plan

  assert {
    condition     = jsondecode(output.reader_json).Statement[0].Condition.StringLike["s3:prefix"] == ["org/llama/*"]
    error_message = "Listing must be limited to the folder, slash included: org/llama* would match org/llama-secret."
  }
  assert {
    condition     = jsondecode(output.reader_json).Statement[1].Resource == ["arn:aws:s3:::example-weights/org/llama/*"]
    error_message = "Reading must be limited to the folder."
  }
  assert {
    condition     = jsondecode(output.reader_json).Statement[1].Action == ["s3:GetObject", "s3:GetObjectVersion"]
    error_message = "A reader needs these two actions, in this order (the committed copy is compared as text)."
  }
  assert {
    condition     = length(jsondecode(output.reader_json).Statement) == 2
    error_message = "Without a key there is no statement about KMS."
  }
  assert {
    condition     = output.urls == ["s3://example-weights/org/llama/"]
    error_message = "A URL ends in a slash, as the policy does."
  }
}

run "reader_never_writes" {
  command = plan

  variables {
    kms_key_arn      = "arn:aws:kms:eu-central-1:111122223333:key/0a1b2c3d"
    stored_checksums = true
  }
  assert {
    condition = alltrue([
      for action in flatten([for statement in jsondecode(output.reader_json).Statement : statement.Action]) :
      can(regex("^(s3:(ListBucket|GetObject|GetObjectVersion|GetObjectAttributes|GetObjectVersionAttributes)|kms:Decrypt)$", action))
    ])
    error_message = "A reader reads."
  }
  assert {
    condition     = !can(regex("\"s3:\\*\"|\"\\*\"", output.reader_json))
    error_message = "No statement may be about every action or every resource."
  }
}

run "key_only_through_s3" {
  command = plan

  variables {
    kms_key_arn = "arn:aws-cn:kms:cn-north-1:111122223333:key/0a1b2c3d"
    partition   = "aws-cn"
  }
  assert {
    condition     = jsondecode(output.reader_json).Statement[2].Condition.StringEquals["kms:ViaService"] == "s3.cn-north-1.amazonaws.com.cn"
    error_message = "The key is for what S3 does with it, in the key's region."
  }
  assert {
    condition     = jsondecode(output.reader_json).Statement[1].Resource == ["arn:aws-cn:s3:::example-weights/org/llama/*"]
    error_message = "ARNs must be of the partition."
  }
}

run "without_versions" {
  command = plan

  variables {
    pin_versions     = false
    stored_checksums = true
  }
  assert {
    condition     = jsondecode(output.reader_json).Statement[1].Action == ["s3:GetObject", "s3:GetObjectAttributes"]
    error_message = "Versions' attributes are of no use to a reader that may not read versions."
  }
}

run "publisher_writes_and_never_deletes" {
  command = plan

  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:111122223333:key/0a1b2c3d"
  }
  assert {
    condition     = strcontains(output.publisher_json, "\"s3:PutObject\"") && strcontains(output.publisher_json, "\"kms:GenerateDataKey\"")
    error_message = "A publisher uploads."
  }
  assert {
    condition     = !strcontains(output.publisher_json, "Delete")
    error_message = "What engines have pinned must stay."
  }
}

run "refuses_wildcards" {
  command = plan

  variables {
    prefixes = ["org/*"]
  }
  expect_failures = [var.prefixes]
}

run "refuses_slashes_at_the_end" {
  command = plan

  variables {
    prefixes = ["org/llama/"]
  }
  expect_failures = [var.prefixes]
}

run "refuses_the_whole_bucket" {
  command = plan

  variables {
    prefixes = []
  }
  expect_failures = [var.prefixes]
}

run "refuses_urls" {
  command = plan

  variables {
    bucket = "s3://example-weights"
  }
  expect_failures = [var.bucket]
}

run "refuses_aliases_of_keys" {
  command = plan

  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:111122223333:alias/weights"
  }
  expect_failures = [var.kms_key_arn]
}
