data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

module "policy" {
  source = "../modules/reader-policy"

  bucket           = var.bucket
  prefixes         = var.prefixes
  partition        = data.aws_partition.current.partition
  kms_key_arn      = var.kms_key_arn
  stored_checksums = var.stored_checksums
}

locals {
  partition = data.aws_partition.current.partition
  account   = data.aws_caller_identity.current.account_id
  region    = data.aws_region.current.region

  # Whoever is on the list is named in full: cluster, namespace and service account.
  # https://docs.aws.amazon.com/eks/latest/userguide/pod-id-abac.html
  pod_identity_trust = [for one in var.pod_identities : {
    Effect    = "Allow"
    Principal = { Service = "pods.eks.amazonaws.com" }
    Action    = ["sts:AssumeRole", "sts:TagSession"]
    Condition = {
      StringEquals = {
        "aws:RequestTag/eks-cluster-arn"            = "arn:${local.partition}:eks:${local.region}:${local.account}:cluster/${one.cluster_name}"
        "aws:RequestTag/kubernetes-namespace"       = one.namespace
        "aws:RequestTag/kubernetes-service-account" = one.service_account
      }
    }
  }]
  # Both conditions are needed: without aud, tokens made for others would do.
  # https://docs.aws.amazon.com/eks/latest/userguide/associate-service-account-role.html
  irsa_trust = [for one in var.irsa : {
    Effect    = "Allow"
    Principal = { Federated = one.oidc_provider_arn }
    Action    = ["sts:AssumeRoleWithWebIdentity"]
    Condition = {
      StringEquals = {
        "${split("oidc-provider/", one.oidc_provider_arn)[1]}:sub" = "system:serviceaccount:${one.namespace}:${one.service_account}"
        "${split("oidc-provider/", one.oidc_provider_arn)[1]}:aud" = "sts.amazonaws.com"
      }
    }
  }]
  trust = concat(local.pod_identity_trust, local.irsa_trust)
}

resource "aws_iam_policy" "reader" {
  name        = "${var.name}-reader"
  description = "List and read checkpoints in ${var.bucket}"
  policy      = module.policy.reader_json
  tags        = var.tags
}

resource "aws_iam_policy" "publisher" {
  name        = "${var.name}-publisher"
  description = "Upload checkpoints to ${var.bucket}"
  policy      = module.policy.publisher_json
  tags        = var.tags
}

resource "aws_iam_role" "reader" {
  count = length(local.trust) > 0 ? 1 : 0

  name                 = var.name
  description          = "Engines that load checkpoints from ${var.bucket}"
  assume_role_policy   = jsonencode({ Version = "2012-10-17", Statement = local.trust })
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags
}

resource "aws_iam_role_policy_attachment" "reader" {
  count = length(aws_iam_role.reader)

  role       = aws_iam_role.reader[0].name
  policy_arn = aws_iam_policy.reader.arn
}

resource "aws_eks_pod_identity_association" "reader" {
  for_each = { for one in var.pod_identities : "${one.cluster_name}/${one.namespace}/${one.service_account}" => one }

  cluster_name    = each.value.cluster_name
  namespace       = each.value.namespace
  service_account = each.value.service_account
  role_arn        = aws_iam_role.reader[0].arn
  tags            = var.tags
}

resource "aws_vpc_endpoint" "s3" {
  count = var.gateway_endpoint == null ? 0 : 1

  # No policy of its own: images of ECR come through it too, from buckets that are not ours to list.
  vpc_id            = var.gateway_endpoint.vpc_id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.gateway_endpoint.route_table_ids
  tags              = var.tags
}
