# The provider is a mock: what it would compute is made up, so these tests assert on what the module itself says.
mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_region" {
    defaults = { region = "eu-central-1" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::111122223333:role/s3stream" }
  }
  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::111122223333:policy/s3stream-reader" }
  }
}

variables {
  bucket   = "example-weights"
  prefixes = ["org/llama"]
}

run "bucket_is_private_and_keeps_versions" {
  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.weights[0].block_public_acls,
      aws_s3_bucket_public_access_block.weights[0].block_public_policy,
      aws_s3_bucket_public_access_block.weights[0].ignore_public_acls,
      aws_s3_bucket_public_access_block.weights[0].restrict_public_buckets,
    ])
    error_message = "All four blocks of public access must be on."
  }
  assert {
    condition     = aws_s3_bucket_versioning.weights[0].versioning_configuration[0].status == "Enabled"
    error_message = "pin=version needs versioning."
  }
  assert {
    condition     = !aws_s3_bucket.weights[0].force_destroy
    error_message = "Weights must not be deleted with the bucket."
  }
  assert {
    condition     = aws_s3_bucket_ownership_controls.weights[0].rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "ACLs must be off."
  }
  assert {
    condition     = one([for rule in aws_s3_bucket_server_side_encryption_configuration.weights[0].rule : rule.bucket_key_enabled])
    error_message = "Without bucket keys every ranged GET asks KMS."
  }
  assert {
    condition     = jsondecode(aws_s3_bucket_policy.weights[0].policy).Statement[0].Condition.Bool["aws:SecureTransport"] == "false"
    error_message = "Plain HTTP must be refused."
  }
  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.weights[0].rule[0].abort_incomplete_multipart_upload[0].days_after_initiation == 7
    error_message = "Uploads that were given up must be removed."
  }
  assert {
    condition     = length(aws_iam_role.reader) == 0 && output.role_arn == null && length(output.service_account_annotations) == 0
    error_message = "There is no role that nobody may take."
  }
  assert {
    condition     = aws_iam_policy.reader.policy == module.policy.reader_json
    error_message = "The reader's policy is the tested one."
  }
}

run "pod_identity" {
  variables {
    pod_identities = [{ cluster_name = "inference", namespace = "inference", service_account = "s3stream" }]
  }
  assert {
    condition = jsondecode(aws_iam_role.reader[0].assume_role_policy).Statement == [{
      Effect    = "Allow"
      Principal = { Service = "pods.eks.amazonaws.com" }
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Condition = {
        StringEquals = {
          "aws:RequestTag/eks-cluster-arn"            = "arn:aws:eks:eu-central-1:111122223333:cluster/inference"
          "aws:RequestTag/kubernetes-namespace"       = "inference"
          "aws:RequestTag/kubernetes-service-account" = "s3stream"
        }
      }
    }]
    error_message = "The role must trust one service account of one cluster."
  }
  assert {
    condition     = aws_eks_pod_identity_association.reader["inference/inference/s3stream"].role_arn == aws_iam_role.reader[0].arn
    error_message = "The association must give the role."
  }
  assert {
    condition     = length(output.service_account_annotations) == 0
    error_message = "Pod Identity needs no annotation."
  }
}

run "irsa" {
  variables {
    irsa = [{
      oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-central-1.amazonaws.com/id/ABCD"
      namespace         = "inference"
      service_account   = "s3stream"
    }]
  }
  assert {
    condition = jsondecode(aws_iam_role.reader[0].assume_role_policy).Statement[0].Condition == {
      StringEquals = {
        "oidc.eks.eu-central-1.amazonaws.com/id/ABCD:aud" = "sts.amazonaws.com"
        "oidc.eks.eu-central-1.amazonaws.com/id/ABCD:sub" = "system:serviceaccount:inference:s3stream"
      }
    }
    error_message = "The role must trust one service account, by sub and aud."
  }
  assert {
    condition     = jsondecode(aws_iam_role.reader[0].assume_role_policy).Statement[0].Principal == { Federated = var.irsa[0].oidc_provider_arn }
    error_message = "The role must trust one OIDC provider."
  }
  assert {
    condition     = output.role_arn != null && output.service_account_annotations == tomap({ "eks.amazonaws.com/role-arn" = output.role_arn })
    error_message = "The annotation must name the role."
  }
}

run "own_key" {
  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:111122223333:key/0a1b2c3d"
  }
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.weights[0].rule).apply_server_side_encryption_by_default).sse_algorithm == "aws:kms"
    error_message = "A key of one's own means SSE-KMS."
  }
}

run "existing_bucket_is_left_alone" {
  variables {
    create_bucket = false
    log_bucket    = "logs"
  }
  assert {
    condition     = length(aws_s3_bucket.weights) + length(aws_s3_bucket_policy.weights) + length(aws_s3_bucket_logging.weights) == 0
    error_message = "Nothing of a bucket that is not ours may change."
  }
}

run "endpoints_and_express" {
  variables {
    express_zone_id  = "euc1-az2"
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"] }
    pod_identities   = [{ cluster_name = "inference", namespace = "inference", service_account = "s3stream" }]
  }
  assert {
    condition     = aws_vpc_endpoint.s3[0].service_name == "com.amazonaws.eu-central-1.s3" && aws_vpc_endpoint.express[0].service_name == "com.amazonaws.eu-central-1.s3express"
    error_message = "Both kinds of bucket have an endpoint of their own."
  }
  assert {
    condition     = aws_s3_directory_bucket.weights[0].bucket == "example-weights--euc1-az2--x-s3" && output.express_url == "s3://example-weights--euc1-az2--x-s3/"
    error_message = "A directory bucket's name ends in its zone."
  }
  assert {
    condition     = jsondecode(aws_iam_policy.express_reader[0].policy).Statement[0].Condition.StringEquals["s3express:SessionMode"] == "ReadOnly"
    error_message = "Sessions must be for reading."
  }
  assert {
    condition     = length(aws_iam_role_policy_attachment.express_reader) == 1
    error_message = "The reader's role needs the policy."
  }
}

run "refuses_names_of_zones" {
  command = plan

  variables {
    express_zone_id = "eu-central-1a"
  }
  expect_failures = [var.express_zone_id]
}

run "refuses_wildcard_subjects" {
  command = plan

  variables {
    irsa = [{ oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/x", namespace = "*", service_account = "s3stream" }]
  }
  expect_failures = [var.irsa]
}

run "refuses_an_endpoint_without_routes" {
  command = plan

  variables {
    gateway_endpoint = { vpc_id = "vpc-1", route_table_ids = [] }
  }
  expect_failures = [var.gateway_endpoint]
}

run "refuses_to_forget_at_once" {
  command = plan

  variables {
    noncurrent_days = 0
  }
  expect_failures = [var.noncurrent_days]
}
