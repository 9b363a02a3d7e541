"""The same model behind other serving stacks, written as their own guides would have it. For comparison only, never for service."""
