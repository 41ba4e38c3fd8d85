"""What the fields of requests and replies mean, in the words of /openapi.json and /docs.

A field means the same wherever its name is, unless it is listed with its schema's name before it.
"""

from __future__ import annotations

from typing import Any

WORDS = {
    # of requests
    "model": "the served name; a request need not say it",
    "messages": "the conversation so far; the answer is its next message",
    "prompt": "a text, token ids, or a list of either: an answer for each",
    "TokenizeRequest.prompt": "a text; or else messages are given, as a chat has them",
    "input": "the user's words, or the items of the conversation so far",
    "instructions": "a system message before the input",
    "max_tokens": "of the answer, thinking included; else as many as fit the context",
    "CompletionRequest.max_tokens": "of the answer, 16 if not said; 0 only with echo",
    "max_completion_tokens": "the newer name of max_tokens; it holds if both are given",
    "max_output_tokens": "of the answer, thinking included; else as many as fit the context",
    "min_tokens": "no stop token or stop string ends the answer before so many",
    "temperature": "0 takes the likeliest token always; 1 if not said",
    "top_p": "sample among the likeliest tokens that sum up to it; 0.95 if not said",
    "top_k": "sample among so many likeliest tokens; 0 or -1: all",
    "min_p": "sample among tokens at least so likely, as a part of the likeliest one's probability",
    "seed": "the same request with the same seed gets the same text; choice i has seed + i",
    "n": "answers to the same prompt",
    "presence_penalty": "taken off the logit of each token that was generated before",
    "frequency_penalty": "the same, for each time that it was generated",
    "repetition_penalty": "divides the logits of tokens that were there; above 1: fewer repeats",
    "logit_bias": "added to the logits of tokens, by id; -100 all but forbids one",
    "stop": "texts that end the answer and are not part of it; they are not looked for in thinking",
    "CompletionRequest.stop": "texts that end the answer and are not part of it",
    "stop_token_ids": "tokens that end the answer, beside the model's own",
    "ignore_eos": "go on after the model's own end, up to the limit",
    "skip_special_tokens": "false shows control tokens by name, in completions",
    "stream": "send the answer as events while it comes",
    "stream_options": "only with stream",
    "include_usage": "the last event holds the usage",
    "logprobs": "of tokens of the answer; thinking and calls have none",
    "ChatRequest.logprobs": "send log probabilities of the content's tokens",
    "CompletionRequest.logprobs": "send log probabilities, each with so many likeliest tokens",
    "top_logprobs": "the likeliest tokens in this place; in a request how many, with logprobs",
    "prompt_logprobs": "likeliest tokens in each place of the prompt, by id; in a request how many",
    "ChatRequest.prompt_logprobs": "not offered: ask /v1/completions",
    "echo": "the text begins with the prompt; with logprobs these have the prompt's as well",
    "best_of": "as n, or nothing",
    "suffix": "not offered",
    "response_format": "the form of the answer: {type: text | json_object}, {type: json_schema, "
    "json_schema: {schema}}, {type: regex, pattern} or {type: grammar, grammar}",
    "structured_outputs": "the form of the answer in vLLM's words; as one field: guided_json, "
    "guided_regex, guided_choice, guided_grammar",
    "json": "a JSON schema",
    "regex": "the whole answer matches it",
    "choice": "one of these texts",
    "grammar": "in Lark's or GBNF's notation",
    "json_object": "any JSON object",
    "structural_tag": "not offered",
    "ResponsesRequest.text": "of what form the text is",
    "format": "as response_format; of a JSON schema, schema stands beside type",
    "tools": "functions that the model may call",
    "ChatMessage.tools": "functions that a system message adds",
    "tool_choice": "none (the answer can hold no call), auto, required (at least one call), or the "
    "function that must be called",
    "parallel_tool_calls": "false: one call in an answer at most",
    "parameters": "a JSON schema of the arguments",
    "description": "what the function does, for the model",
    "strict": "true: arguments of its calls always fit the schema",
    "reasoning_effort": "how much to think: not at all, ..., or max, which holds if not said",
    "effort": "how much to think: not at all, ..., or max, which holds if not said",
    "thinking": "false, or {type: disabled}: no thinking",
    "chat_template_kwargs": "of other servers' templates, those that apply here",
    "thinking_effort": "as reasoning_effort",
    "metadata": "comes back in the response",
    "tokens": "token ids; in log probabilities their texts",
    "steps": "steps to profile",
    # of messages
    "role": "who speaks; developer is read as system",
    "name": "of a function, or of who speaks",
    "content": "the text",
    "ReplyChatLogprobs.content": "an entry for each token of the content",
    "reasoning_content": "what the model thought; sent back it saves computing the turn again",
    "reasoning": "the same, as newer clients call it",
    "ResponsesRequest.reasoning": "how to think",
    "tool_calls": "calls of functions",
    "tool_call_id": "of the call whose result this is",
    "arguments": "JSON text",
    "FunctionCall.arguments": "JSON text, or an object",
    # of replies
    "id": "of this reply, or of a call",
    "created": "Unix time",
    "choices": "the answers, or the next piece of one",
    "index": "which answer, or which call, of several",
    "finish_reason": "stop: the model or a stop text ended it; length: the limit; tool_calls: the "
    "calls' results are awaited; null: more comes",
    "stop_reason": "the stop text or the stop_token_id that ended it",
    "text_offset": "where in the text each token begins",
    "token_logprobs": "the first token of a prompt has none",
    "bytes": "of the token's text, which may be part of a character",
    "rank": "1 is the likeliest; null is below those that were asked for",
    "prompt_tokens": "of the prompt, once for all its answers",
    "completion_tokens": "generated, the token that ends an answer included",
    "cached_tokens": "of the prompt, not computed again",
    "reasoning_tokens": "of the thinking",
    "accepted_prediction_tokens": "drafts of speculative decoding that were right",
    "max_model_len": "tokens of prompt and answer together at most",
}


def describe(schemas: dict[str, dict[str, Any]]) -> None:
    """Add what is known of their fields to schemas, by name."""
    for name, schema in schemas.items():
        for field, content in schema.get("properties", {}).items():
            words = WORDS.get(f"{name}.{field}", WORDS.get(field))
            if words is not None and "const" not in content:
                content.setdefault("description", words)
