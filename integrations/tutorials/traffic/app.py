"""A chat app, written against the plain `openai` package. Nothing in it knows ajet."""

from __future__ import annotations

from uuid import uuid4

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


class Chat:
    """A chat with the model at OPENAI_BASE_URL. The app has a name for it, by which a provider may keep its prompt."""

    def __init__(self, model: str = "policy", max_tokens: int = 6) -> None:
        self._client, self._name = OpenAI(), uuid4().hex
        self._model, self._max_tokens = model, max_tokens
        self._messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Reply with one number."}]

    def say(self, text: str) -> str:
        """The model's answer to `text`."""
        self._messages.append({"role": "user", "content": text})
        answered = self._client.chat.completions.create(
            model=self._model, messages=self._messages, max_tokens=self._max_tokens, temperature=1.0,
            prompt_cache_key=self._name,
        )  # fmt: skip
        said = answered.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": said})
        return said


if __name__ == "__main__":
    chat = Chat()
    while True:
        print(chat.say(input("> ")))
