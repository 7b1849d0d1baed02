variable "bucket" {
  description = "Name of the bucket to make."
  type        = string
}

variable "vpc_id" {
  description = "VPC of the cluster."
  type        = string
}

variable "route_table_ids" {
  description = "Route tables of the nodes' subnets."
  type        = list(string)
}
