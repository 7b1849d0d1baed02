locals {
  arn     = "arn:${var.partition}:s3:::${var.bucket}"
  objects = [for prefix in var.prefixes : "${local.arn}/${prefix}/*"]

  read_actions = concat(
    ["s3:GetObject"],
    var.pin_versions ? ["s3:GetObjectVersion"] : [],
    var.stored_checksums ? ["s3:GetObjectAttributes"] : [],
    var.stored_checksums && var.pin_versions ? ["s3:GetObjectVersionAttributes"] : [],
  )
  key_region = var.kms_key_arn == null ? null : split(":", var.kms_key_arn)[3]
  via_s3 = {
    StringEquals = { "kms:ViaService" = "s3.${local.key_region == null ? "" : local.key_region}.${var.partition == "aws-cn" ? "amazonaws.com.cn" : "amazonaws.com"}" }
  }

  list = {
    Sid      = "List"
    Effect   = "Allow"
    Action   = "s3:ListBucket"
    Resource = local.arn
    # The slash is what keeps "llama" from meaning "llama-secret" too. HeadBucket and listings without a prefix carry no
    # s3:prefix and are refused; s3stream never asks for either. Without this statement a missing object would be a 403.
    Condition = { StringLike = { "s3:prefix" = [for prefix in var.prefixes : "${prefix}/*"] } }
  }
  read = {
    Sid      = "Read"
    Effect   = "Allow"
    Action   = local.read_actions
    Resource = local.objects
  }
  decrypt = var.kms_key_arn == null ? [] : [{
    Sid       = "Decrypt"
    Effect    = "Allow"
    Action    = ["kms:Decrypt"]
    Resource  = var.kms_key_arn
    Condition = local.via_s3
  }]
  write = {
    Sid      = "Write"
    Effect   = "Allow"
    Action   = ["s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    Resource = local.objects
  }
  encrypt = var.kms_key_arn == null ? [] : [{
    Sid       = "Encrypt"
    Effect    = "Allow"
    Action    = ["kms:GenerateDataKey"]
    Resource  = var.kms_key_arn
    Condition = local.via_s3
  }]

  reader = {
    Version   = "2012-10-17"
    Statement = concat([local.list, local.read], local.decrypt)
  }
  publisher = {
    Version   = "2012-10-17"
    Statement = concat([local.list, local.read, local.write], local.decrypt, local.encrypt)
  }
}
