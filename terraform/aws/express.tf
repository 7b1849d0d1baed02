# A directory bucket holds copies of what engines in one zone start from. It has no versions and no policies by
# prefix: whoever may open a session reads all of it.
locals {
  express_bucket = var.express_zone_id == null ? null : "${replace(var.bucket, ".", "-")}--${var.express_zone_id}--x-s3"
  express_reader = {
    Version = "2012-10-17"
    Statement = [{
      Sid      = "ReadOnlySessions"
      Effect   = "Allow"
      Action   = "s3express:CreateSession"
      Resource = local.express_bucket == null ? "" : "arn:${local.partition}:s3express:${local.region}:${local.account}:bucket/${local.express_bucket}"
      # Clients ask for ReadWrite first and, refused, for this.
      Condition = { StringEquals = { "s3express:SessionMode" = "ReadOnly" } }
    }]
  }
}

resource "aws_s3_directory_bucket" "weights" {
  count = var.express_zone_id == null ? 0 : 1

  bucket          = local.express_bucket
  data_redundancy = "SingleAvailabilityZone"
  type            = "Directory"

  location {
    name = var.express_zone_id
    type = "AvailabilityZone"
  }
}

resource "aws_iam_policy" "express_reader" {
  count = length(aws_s3_directory_bucket.weights)

  name        = "${var.name}-express"
  description = "Read all of ${local.express_bucket}"
  policy      = jsonencode(local.express_reader)
  tags        = var.tags
}

resource "aws_iam_role_policy_attachment" "express_reader" {
  count = length(aws_iam_role.reader) * length(aws_s3_directory_bucket.weights)

  role       = aws_iam_role.reader[0].name
  policy_arn = aws_iam_policy.express_reader[0].arn
}

resource "aws_vpc_endpoint" "express" {
  count = var.gateway_endpoint == null || var.express_zone_id == null ? 0 : 1

  vpc_id            = var.gateway_endpoint.vpc_id
  service_name      = "com.amazonaws.${local.region}.s3express"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.gateway_endpoint.route_table_ids
  tags              = var.tags
}
