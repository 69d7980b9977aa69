// The official openai package against the stack: node openai_client.mjs http://ADDRESS; prints what it got as JSON.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const terms = { model: "embedded", temperature: 0 };
const Pet = z.object({ name: z.string().max(20), kind: z.enum(["cat", "dog"]) });
const hello = [{ role: "user", content: "Say hello." }];
const rex = "Tell me about a dog called Rex.";
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { name: "weather", description: "Return the weather of a city.", parameters, strict: true };

async function chat() {
  const { completions } = client.chat;
  const stream = completions.stream({
    ...terms, messages: hello, max_completion_tokens: 12, stream_options: { include_usage: true },
  });
  const demanded = {
    ...terms,
    messages: [{ role: "user", content: "Weather in Paris?" }],
    tools: [{ type: "function", function: weather }],
    tool_choice: "required",
    max_completion_tokens: 60,
  };
  const form = { ...terms, messages: [{ role: "user", content: rex }], response_format: zodResponseFormat(Pet, "pet") };
  const called = (message) =>
    message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return {
    whole: (await completions.create({ ...terms, messages: hello, max_completion_tokens: 12 })).choices[0].message.content,
    streamed: await stream.finalContent(),
    usage: (await stream.totalUsage()).completion_tokens,
    calls: called((await completions.create(demanded)).choices[0].message),
    streamed_calls: called(await completions.stream(demanded).finalMessage()),
    form: (await completions.parse(form)).choices[0].message.parsed,
    streamed_form: (await completions.stream(form).finalMessage()).parsed,
  };
}

async function responses() {
  const short = { ...terms, input: "Say hello.", max_output_tokens: 12 };
  const demanded = {
    ...terms,
    input: "Weather in Paris?",
    tools: [{ type: "function", ...weather }],
    tool_choice: "required",
    max_output_tokens: 60,
  };
  const form = { ...terms, input: rex, text: { format: zodTextFormat(Pet, "pet") } };
  const called = ({ output }) =>
    output.filter(({ type }) => type === "function_call").map((call) => [call.name, JSON.parse(call.arguments)]);
  let streamed = "";
  const stream = client.responses.stream(short).on("response.output_text.delta", ({ delta }) => (streamed += delta));
  const { usage } = await stream.finalResponse();
  return {
    whole: (await client.responses.create(short)).output_text,
    streamed,
    usage: usage.output_tokens,
    calls: called(await client.responses.create(demanded)),
    streamed_calls: called(await client.responses.stream(demanded).finalResponse()),
    form: (await client.responses.parse(form)).output_parsed,
    streamed_form: (await client.responses.stream(form).finalResponse()).output_parsed,
  };
}

console.log(JSON.stringify({ chat: await chat(), responses: await responses() }));
