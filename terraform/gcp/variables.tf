variable "project_id" {
  description = "Project of the bucket and the cluster."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "project_id must be a project's id, not its name or number."
  }
}

variable "bucket" {
  description = "Name of the bucket to make."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket must be a bucket's name: 3 to 63 lower-case letters, digits, dots, hyphens and underscores."
  }
}

variable "location" {
  description = "Region of the bucket, best that of the GPUs, such as \"europe-west4\"."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z][A-Za-z0-9-]+$", var.location))
    error_message = "location must be a region, dual-region or multi-region."
  }
}

variable "prefixes" {
  description = "Folders that the readers may read, without slashes at either end, such as \"org/llama\"."
  type        = list(string)

  validation {
    condition     = length(var.prefixes) > 0 && alltrue([for prefix in var.prefixes : can(regex("^[^/]+(/[^/]+)*$", prefix))])
    error_message = "prefixes must name at least one folder, each like \"org/llama\": no slash at either end and none doubled."
  }
}

variable "readers" {
  description = "Service accounts of Kubernetes that read, by Workload Identity Federation for GKE, which the cluster must have on."
  type = list(object({
    namespace       = string
    service_account = string
  }))
  default = []

  validation {
    condition     = alltrue([for one in var.readers : can(regex("^[a-z0-9-]+/[a-z0-9.-]+$", "${one.namespace}/${one.service_account}"))])
    error_message = "namespace and service_account must be names of Kubernetes."
  }
}

variable "kms_key_name" {
  description = "Key of Cloud KMS, projects/P/locations/L/keyRings/R/cryptoKeys/K; null for Google's own keys. The project's storage agent must be allowed to use it."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_name == null || can(regex("^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$", var.kms_key_name))
    error_message = "kms_key_name must be the full name of a key, without a version."
  }
}

variable "noncurrent_days" {
  description = "Days for which replaced or deleted objects stay. Longer than any engine runs on them, else its restart fails."
  type        = number
  default     = 90

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "noncurrent_days must be a whole number of days, at least 1."
  }
}

variable "log_bucket" {
  description = "Bucket for access logs; null for none."
  type        = string
  default     = null
}

variable "labels" {
  description = "Labels of the bucket."
  type        = map(string)
  default     = {}
}
