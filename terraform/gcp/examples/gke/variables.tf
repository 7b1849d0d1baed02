variable "project_id" {
  description = "Project of the bucket and the cluster."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket to make."
  type        = string
}
