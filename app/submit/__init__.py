"""`trireme submit`: `ray job submit` done well."""
