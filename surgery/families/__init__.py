"""What architectures mean by their config fields and tensor names: `schema` has the terms, `records` all of them."""
