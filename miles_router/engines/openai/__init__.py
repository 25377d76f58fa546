"""The engine's OpenAI endpoints: what chat and completions are asked, and what they answer. Pure."""
