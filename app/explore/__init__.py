"""The pages for people: `/explore`, `/docs`, and what `/` says. Their scripts speak the public API and load nothing from elsewhere."""
