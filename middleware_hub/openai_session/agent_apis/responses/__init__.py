"""OpenAI's Responses API (`/v1/responses`), translated to chat turns.

request        parses the settings of a request, and refuses what cannot be traced
conversation   instructions, earlier turns and input items to chat messages
attribution    finds the recorded answers that input items without ids belong to
tools          tools to chat functions, and calls back to items
forms          how calls of each kind of tool are written
items          answers and inputs as items
stream         the events of a streamed answer
open_items     the events of each item, from its first to its last
heartbeat      the events of a stream that waits
envelope       the response object around an answer, and the responses that a session stores
errors         errors in this API's format
api           the API class that uses all of these
"""
