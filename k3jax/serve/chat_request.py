"""What chat clients ask: conversations, tools, and how to answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from k3jax.chat import EFFORTS, ChatOptions
from k3jax.chat.constrain import Calls
from k3jax.request import MAX_LOGPROBS
from k3jax.serve.errors import bad_request, not_offered
from k3jax.serve.protocol import INT32, GenerationRequest, Strict, value_or


class ContentPart(Strict):
    """A part of a message's content; only text is read."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _only_text(self) -> Self:
        if self.type != "text":
            what = "images are" if "image" in self.type else f"a part of type {self.type!r} is"
            raise ValueError(f"{what} not supported: this server reads text only")
        if self.text is None:
            raise ValueError("a part of type 'text' must have a text")
        return self


class FunctionCall(Strict):
    """A call that the assistant made; arguments are JSON text, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Strict):
    """One of an assistant message's calls."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Function(Strict):
    """What a tool is called and takes; further keys go to the model as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatMessage(Strict):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[Tool] | None = None  # a system message may declare more of them

    def rendered(self) -> dict[str, Any]:
        """The message as the chat format reads it."""
        message = self.model_dump(exclude_none=True, exclude={"tools"})
        if self.tools:
            message["tools"] = tools_as_given(self.tools)
        if self.role == "developer":
            message["role"] = "system"
        return message


class Thinking(Strict):
    """Whether to think before the answer, as Kimi's own service has it."""

    type: Literal["enabled", "disabled"]


class TemplateOptions(Strict):
    """`chat_template_kwargs` of other servers, as far as they apply."""

    thinking: bool | None = None
    thinking_effort: Literal["low", "medium", "high", "max"] | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "low", "medium", "high", "max"] | None = None
    thinking: bool | Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def token_limit(self) -> int | None:
        return value_or(self.max_completion_tokens, self.max_tokens)

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinks(self) -> bool:
        """Whether the model is to think; it does unless told not to."""
        asked = self.thinking.type == "enabled" if isinstance(self.thinking, Thinking) else None
        asked = self.thinking if isinstance(self.thinking, bool) else asked
        in_template = self.chat_template_kwargs and self.chat_template_kwargs.thinking
        return self.reasoning_effort != "none" and asked is not False and in_template is not False

    @property
    def effort(self) -> str:
        """How much to think."""
        in_template = self.chat_template_kwargs and self.chat_template_kwargs.thinking_effort
        return self.reasoning_effort or in_template or EFFORTS[-1]

    def check(self) -> None:
        super().check()
        if self.prompt_logprobs is not None:
            raise not_offered("prompt_logprobs of a chat", "prompt_logprobs")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs goes with logprobs = true only", "top_logprobs")
        if self.must_call and not self.callable_tools:
            raise bad_request("tool_choice asks for a call of a tool that is not declared", "tools")
        held = self.must_call or self.must_not_call
        if held and (self.ignore_eos or self.min_tokens):
            raise bad_request("ignore_eos and min_tokens do not go with tool_choice", "tool_choice")

    @property
    def declared_tools(self) -> list[dict[str, Any]]:
        """All tools: the request's own, and those of its system messages."""
        own = tools_as_given(self.tools)
        return own + [tool for said in self.messages for tool in tools_as_given(said.tools)]

    @property
    def must_call(self) -> bool:
        """Whether the answer must hold a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def must_not_call(self) -> bool:
        """Whether the answer must hold no call, though there are tools."""
        return self.tool_choice == "none" and bool(self.declared_tools)

    @property
    def is_held(self) -> bool:
        return super().is_held or self.calls is not None or self.must_not_call

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that tool_choice leaves."""
        tools = self.declared_tools
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in tools if tool["function"]["name"] == name][:1]
        return [] if self.tool_choice == "none" else tools

    @property
    def calls(self) -> Calls | None:
        """The calls that the answer's grammar spells out; None: none needs be."""
        tools = self.callable_tools
        strict = any(tool["function"].get("strict") for tool in tools)
        if not tools or not (self.must_call or strict or self.form):
            return None
        return Calls(tools, parallel=not self.calls_once, required=self.must_call)

    @property
    def calls_once(self) -> bool:
        """Whether one call is all that an answer may hold."""
        return self.parallel_tool_calls is False

    def chat_options(self) -> ChatOptions:
        """What the prompt says beside the conversation."""
        choice = "required" if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return ChatOptions(
            thinking=self.thinks,
            thinking_effort=self.effort,
            tool_choice=choice if self.declared_tools else None,
            response_format=self.response_format,
        )


class TokenizeRequest(ChatRequest):
    """POST /tokenize: a text, or what /v1/chat/completions takes, for the prompt that it makes."""

    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list, min_length=1)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        return self


def tools_as_given(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as the client wrote them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools or ()]
