"""OpenAI's requests, replies and errors over our jobs: what the server and bulk runs share."""
