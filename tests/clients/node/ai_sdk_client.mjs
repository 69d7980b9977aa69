// The Vercel AI SDK against the stack: node ai_sdk_client.mjs http://ADDRESS; prints what it got as JSON.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "triptych",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const terms = { model: provider("embedded"), temperature: 0, maxRetries: 0 };
const hello = { ...terms, prompt: "Say hello.", maxOutputTokens: 12 };
const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `rain in ${city}`,
});
const demanded = {
  ...terms,
  prompt: "Weather in Paris?",
  tools: { weather },
  toolChoice: "required",
  stopWhen: stepCountIs(1),
  maxOutputTokens: 60,
};
const form = {
  ...terms,
  prompt: "Tell me about a dog called Rex.",
  output: Output.object({ schema: z.object({ name: z.string().max(20), kind: z.enum(["cat", "dog"]) }) }),
  maxOutputTokens: 80,
};
// What every z.record() of zod gives beside: `propertyNames`.
const record = {
  ...form,
  output: Output.object({ schema: z.object({ kinds: z.record(z.enum(["cat", "dog"]), z.boolean()) }) }),
};
const rethrow = ({ error }) => {
  throw error;
};
const called = (results) => results.map(({ toolName, input, output }) => [toolName, input, output]);

const stream = streamText({ ...hello, onError: rethrow });
const texts = [];
for await (const text of stream.textStream) texts.push(text);
const calling = streamText({ ...demanded, onError: rethrow });
const forming = streamText({ ...form, onError: rethrow });
const partial = [];
for await (const object of forming.partialOutputStream) partial.push(object);
console.log(
  JSON.stringify({
    whole: (await generateText(hello)).text,
    streamed: texts.join(""),
    usage: (await stream.usage).outputTokens,
    finish: await stream.finishReason,
    calls: called((await generateText(demanded)).toolResults),
    streamed_calls: called(await calling.toolResults),
    form: (await generateText(form)).output,
    streamed_form: partial.at(-1),
    record: (await generateText(record)).output,
  }),
);
