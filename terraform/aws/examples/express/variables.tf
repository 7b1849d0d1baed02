variable "bucket" {
  description = "Name of the bucket that there is."
  type        = string
}
