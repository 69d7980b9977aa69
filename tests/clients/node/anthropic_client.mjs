// The official @anthropic-ai/sdk against the stack: node anthropic_client.mjs http://ADDRESS; prints what it got as JSON.

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const Pet = z.object({ name: z.string().max(20), kind: z.enum(["cat", "dog"]) });
const ask = (content, fields) => ({
  model: "embedded", temperature: 0, max_tokens: 80, messages: [{ role: "user", content }], ...fields,
});
const hello = ask("Say hello.", { max_tokens: 12 });
const demanded = ask("Weather in Paris?", {
  tool_choice: { type: "any" },
  tools: [
    {
      name: "weather",
      description: "Return the weather of a city.",
      input_schema: {
        type: "object",
        properties: { city: { enum: ["Paris", "Rome"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  ],
});
const form = ask("Tell me about a dog called Rex.", { output_config: { format: zodOutputFormat(Pet) } });
const called = ({ content }) => content.filter(({ type }) => type === "tool_use").map(({ name, input }) => [name, input]);

const { messages } = client;
let streamed = "";
const stream = messages.stream(hello).on("text", (delta) => (streamed += delta));
const { usage } = await stream.finalMessage();
const first = await messages.create(demanded);
const results = first.content
  .filter(({ type }) => type === "tool_use")
  .map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "rain" }));
const turns = [...demanded.messages, { role: "assistant", content: first.content }, { role: "user", content: results }];
console.log(
  JSON.stringify({
    whole: (await messages.create(hello)).content[0].text,
    streamed,
    usage: usage.output_tokens,
    calls: called(first),
    streamed_calls: called(await messages.stream(demanded).finalMessage()),
    answered: (await messages.create({ ...demanded, messages: turns, tool_choice: { type: "none" }, max_tokens: 12 })).role,
    form: (await messages.parse(form)).parsed_output,
    streamed_form: JSON.parse(await messages.stream(form).finalText()),
    num_tokens: (await messages.countTokens({ model: "embedded", messages: hello.messages })).input_tokens,
  }),
);
