"""The APIs that agents speak, a file each: a request to messages, tools and settings, an answer to the API's own."""
