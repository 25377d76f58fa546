"""Anthropic's Messages API (`/v1/messages`), translated to chat turns.

request        a request's settings, and what of it is refused
conversation   system prompt and messages to chat messages
tools          tools, those that are loaded later among them
echo           what comes back of an answer, matched with what was sampled
answer         a whole answer
stream         its events
errors         errors in this API's words
models         the list of models
face           all of it put together
"""
