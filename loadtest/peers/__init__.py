"""The same model behind other serving stacks, written as their guides show. For comparison only."""
