variable "bucket" {
  description = "Name of the bucket that holds the checkpoints. It is created unless create_bucket is false."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be a bucket's name: 3 to 63 lower-case letters, digits, dots and hyphens."
  }
}

variable "create_bucket" {
  description = "Whether to make the bucket. False leaves an existing one as it is, policy and encryption included."
  type        = bool
  default     = true
}

variable "prefixes" {
  description = "Folders that the reader may read, without slashes at either end, such as \"org/llama\"."
  type        = list(string)
}

variable "name" {
  description = "Name of the role, and beginning of the policies' names."
  type        = string
  default     = "s3stream"

  validation {
    condition     = can(regex("^[A-Za-z0-9+=,.@_-]{1,54}$", var.name))
    error_message = "name must be 1 to 54 letters, digits or any of +=,.@_- (IAM's limit is 64, less \"-publisher\")."
  }
}

variable "kms_key_arn" {
  description = "Key of SSE-KMS for the bucket; null for S3's own keys, which cost nothing. A key of another account must allow the role in its own policy too."
  type        = string
  default     = null
}

variable "noncurrent_days" {
  description = "Days for which replaced or deleted objects stay readable. Longer than any engine runs on a pinned version, else its restart fails."
  type        = number
  default     = 90

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "noncurrent_days must be a whole number of days, at least 1."
  }
}

variable "log_bucket" {
  description = "Bucket for server access logs; null for none. It must let logging.s3.amazonaws.com write."
  type        = string
  default     = null
}

variable "stored_checksums" {
  description = "Whether the reader may read the checksums of parts, which integrity=checksums needs for files that were uploaded in parts."
  type        = bool
  default     = false
}

variable "pod_identities" {
  description = "Service accounts that read by EKS Pod Identity. The cluster needs the add-on eks-pod-identity-agent."
  type = list(object({
    cluster_name    = string
    namespace       = string
    service_account = string
  }))
  default = []
}

variable "irsa" {
  description = "Service accounts that read by IAM roles for service accounts: the ARN of the cluster's OIDC provider, and who."
  type = list(object({
    oidc_provider_arn = string
    namespace         = string
    service_account   = string
  }))
  default = []

  validation {
    condition     = alltrue([for one in var.irsa : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/.+$", one.oidc_provider_arn))])
    error_message = "oidc_provider_arn must be like arn:aws:iam::ACCOUNT:oidc-provider/oidc.eks.REGION.amazonaws.com/id/ID."
  }
  validation {
    # `*` in a subject would trust every service account of a cluster, and StringEquals takes it literally anyway.
    condition     = alltrue([for one in var.irsa : !can(regex("[*?]", "${one.namespace}${one.service_account}"))])
    error_message = "namespace and service_account must be names, without wildcards."
  }
}

variable "permissions_boundary_arn" {
  description = "Permissions boundary of the role, where an organisation asks for one."
  type        = string
  default     = null
}

variable "gateway_endpoint" {
  description = "Where to make an S3 gateway endpoint, so that weights do not go through a NAT gateway, which bills by the byte; null for none."
  type = object({
    vpc_id          = string
    route_table_ids = list(string)
  })
  default = null

  validation {
    condition     = var.gateway_endpoint == null ? true : length(var.gateway_endpoint.route_table_ids) > 0
    error_message = "route_table_ids must name the route tables of the nodes' subnets: without any the endpoint does nothing."
  }
}

variable "express_zone_id" {
  description = "Id (not name) of the zone for a directory bucket, S3 Express One Zone, such as \"use1-az4\"; null for none."
  type        = string
  default     = null

  validation {
    condition     = var.express_zone_id == null || can(regex("^[a-z]{3,4}[0-9]-az[0-9]+$", var.express_zone_id))
    error_message = "express_zone_id must be a zone's id, such as use1-az4; names such as us-east-1a differ between accounts."
  }
}

variable "tags" {
  description = "Tags of everything that is made."
  type        = map(string)
  default     = {}
}
