"""An agent that speaks Anthropic's Messages, over litellm's adapter to chat."""

import asyncio
import json
import sys

import litellm

TOOLS = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
    {
        "name": "look",
        "description": "Looks something up.",
        "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
]


def used(name, given):
    return str(given["a"] + given["b"]) if name == "add" else f"{given['name']}: nothing"


async def read(stream):
    """The content of a streamed answer, put together as Anthropic's clients do."""
    blocks = {}
    async for raw in stream:
        for line in raw.decode().splitlines() if isinstance(raw, bytes) else [f"data: {json.dumps(raw)}"]:
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "partial": ""}
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    block["partial"] += delta["partial_json"]
                elif delta["type"] == f"{block['type']}_delta":  # others are left out, as Anthropic's client does
                    block[block["type"]] += delta[block["type"]]
    for block in blocks.values():
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial or "{}")
    return [block for _, block in sorted(blocks.items()) if block.get("text") != ""]


async def main(base_url, mode):
    messages = [{"role": "user", "content": "What is 17 plus 25?"}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    while True:
        answer = await litellm.anthropic.messages.acreate(
            model="openai/m",
            api_base=base_url,
            api_key="none",
            max_tokens=1000,
            system=system,
            tools=TOOLS,
            messages=messages,
            stream=mode == "streamed",
        )
        content = await read(answer) if mode == "streamed" else answer["content"]
        content = [dict(block) for block in content]
        messages.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": used(block["name"], block["input"])}
            for block in content
            if block["type"] == "tool_use"
        ]
        if not results:
            print("".join(block.get("text") or "" for block in content))
            return
        messages.append({"role": "user", "content": results})


asyncio.run(main(*sys.argv[1:]))
