"""Why a checkpoint ranks a request as it does: figures of the plain path, pictures of them, one page."""
