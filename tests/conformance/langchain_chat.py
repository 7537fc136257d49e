"""LangChain's chat models for the suite of langchain-tests: which class, and where it finds its engine.

Run by `tests.conformance` in the suite's own environment. The tests are those of `ChatModelIntegrationTests`, of which
not one is changed; the chat models read ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL`` by themselves.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

PARAMS: dict[str, Any] = {
    "model": os.environ["CONFORMANCE_MODEL"], "temperature": 0, "max_tokens": 100, "max_retries": 0, "timeout": 60,
}  # fmt: skip


class TestChatCompletions(ChatModelIntegrationTests):
    """`ChatOpenAI` on ``/v1/chat/completions``."""

    chat_model_class = ChatOpenAI
    chat_model_params: ClassVar[dict[str, Any]] = {**PARAMS, "stream_usage": True}
    supports_json_mode = True


class TestResponses(TestChatCompletions):
    """`ChatOpenAI` on ``/v1/responses``."""

    chat_model_params: ClassVar[dict[str, Any]] = {**PARAMS, "use_responses_api": True}


class TestMessages(ChatModelIntegrationTests):
    """`ChatAnthropic` on ``/v1/messages``."""

    chat_model_class = ChatAnthropic
    chat_model_params = PARAMS
