"""OpenAI's Responses API (`/v1/responses`), translated to chat turns.

request        a request's settings, and what of it is refused
conversation   instructions, the turns before, and input items to chat messages
tools          tools to functions of a chat, and back
forms          how calls of each kind of tool are written
items          what was said as items: an answer's, and those of its input
stream         an answer's events
open_items     those of each item, from its first to its last
envelope       what stands around an answer, and the responses that a session keeps
errors         errors in this API's words
face           all of it put together
"""
