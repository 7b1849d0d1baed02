resource "aws_s3_bucket" "weights" {
  #checkov:skip=CKV_AWS_144:Checkpoints can be uploaded again from where they were made; a copy in another region doubles the bill and is for whoever needs it to add.
  #checkov:skip=CKV2_AWS_62:Nothing here acts on uploads, so there is nobody to notify.
  #checkov:skip=CKV_AWS_18:Access logs are an option, log_bucket, because they need a bucket of their own.
  #checkov:skip=CKV_AWS_145:SSE-S3 by default: a customer's key (kms_key_arn) costs a KMS call per object and key policies across accounts.
  count = var.create_bucket ? 1 : 0

  bucket        = var.bucket
  force_destroy = false
  tags          = var.tags
}

resource "aws_s3_bucket_ownership_controls" "weights" {
  count  = length(aws_s3_bucket.weights)
  bucket = aws_s3_bucket.weights[0].id

  rule {
    object_ownership = "BucketOwnerEnforced" # no ACLs: whoever uploads cannot keep objects from the reader
  }
}

resource "aws_s3_bucket_public_access_block" "weights" {
  count  = length(aws_s3_bucket.weights)
  bucket = aws_s3_bucket.weights[0].id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "weights" {
  count  = length(aws_s3_bucket.weights)
  bucket = aws_s3_bucket.weights[0].id

  versioning_configuration {
    status = "Enabled" # what pin=version reads on from when a checkpoint is replaced during a load
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "weights" {
  count  = length(aws_s3_bucket.weights)
  bucket = aws_s3_bucket.weights[0].id

  rule {
    bucket_key_enabled = true # else every ranged GET is a call to KMS, which bills and throttles those

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "weights" {
  count      = length(aws_s3_bucket.weights)
  bucket     = aws_s3_bucket.weights[0].id
  depends_on = [aws_s3_bucket_versioning.weights]

  rule {
    id     = "abort-incomplete-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  rule {
    id     = "expire-replaced-versions"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.noncurrent_days
    }
    expiration {
      expired_object_delete_marker = true
    }
  }
}

locals {
  tls_only = {
    Version = "2012-10-17"
    Statement = [{
      Sid       = "TlsOnly"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = ["arn:${local.partition}:s3:::${var.bucket}", "arn:${local.partition}:s3:::${var.bucket}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  }
}

resource "aws_s3_bucket_policy" "weights" {
  count  = length(aws_s3_bucket.weights)
  bucket = aws_s3_bucket.weights[0].id
  policy = jsonencode(local.tls_only)

  depends_on = [aws_s3_bucket_public_access_block.weights] # S3 refuses changes of both at once
}

resource "aws_s3_bucket_logging" "weights" {
  count  = var.create_bucket && var.log_bucket != null ? 1 : 0
  bucket = aws_s3_bucket.weights[0].id

  target_bucket = var.log_bucket
  target_prefix = "${var.bucket}/"
}
