"""The HTTP server: OpenAI's routes and our own over the queue. Needs the extra `api`."""
