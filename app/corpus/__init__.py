"""The corpus that is served: searches, and changes of its posts by the admin interface or a feed."""
