variable "bucket" {
  description = "Name of the bucket (not its ARN, not an s3:// URL)."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be a bucket's name: 3 to 63 lower-case letters, digits, dots and hyphens."
  }
}

variable "prefixes" {
  description = "Folders of the bucket that may be read, without slashes at either end, such as \"org/llama\". At least one."
  type        = list(string)

  validation {
    condition     = length(var.prefixes) > 0 && length(distinct(var.prefixes)) == length(var.prefixes)
    error_message = "prefixes must name at least one folder, and none twice."
  }
  validation {
    # `*` and `?` are wildcards of IAM, `$` begins its variables: any of them would widen the policy unseen.
    condition     = alltrue([for prefix in var.prefixes : can(regex("^[^/*?$]+(/[^/*?$]+)*$", prefix))])
    error_message = "Each of prefixes must be like \"org/llama\": no slash at either end, none doubled, and no *, ? or $."
  }
}

variable "partition" {
  description = "Partition of the bucket's ARN."
  type        = string
  default     = "aws"

  validation {
    condition     = can(regex("^aws(-[a-z-]+)?$", var.partition))
    error_message = "partition must be aws, aws-cn, aws-us-gov or another one of AWS."
  }
}

variable "pin_versions" {
  description = "Whether versions of objects may be read, which pin=version needs."
  type        = bool
  default     = true
}

variable "stored_checksums" {
  description = "Whether the checksums of parts may be read, which integrity=checksums and `s3stream verify` need for files that were uploaded in parts."
  type        = bool
  default     = false
}

variable "kms_key_arn" {
  description = "Key of SSE-KMS with which the objects are encrypted; null when S3's own keys are used."
  type        = string
  default     = null

  validation {
    # An alias cannot stand in a Resource: kms:Decrypt is checked against the key.
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[a-z0-9-]+$", var.kms_key_arn))
    error_message = "kms_key_arn must be the ARN of a key, arn:aws:kms:REGION:ACCOUNT:key/ID; an alias does not work in a policy."
  }
}
