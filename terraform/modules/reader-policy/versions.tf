# No provider: the policies are text, so they can be tested without one.
terraform {
  required_version = ">= 1.7"
}
