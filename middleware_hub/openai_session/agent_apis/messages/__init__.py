"""Anthropic's Messages API (`/v1/messages`), translated to chat turns.

request        parses the settings of a request, and refuses what cannot be traced
conversation   system prompt and messages to chat messages
tools          tool definitions, including tools that are loaded later
echo           matches content that an agent sends back with the answer that was sampled
answer         an answer that is not streamed
stream         the events of a streamed answer
errors         errors in this API's format
models         the list of models
api           the API class that uses all of these
"""
