// The official openai package against a Triptych server: node openai.mjs http://ADDRESS/v1

import OpenAI from "openai";

const [baseURL, ...rest] = process.argv.slice(2);
if (baseURL === undefined || rest.length > 0) {
  console.error("usage: node openai.mjs http://ADDRESS/v1");
  process.exit(2);
}
const client = new OpenAI({ baseURL, apiKey: process.env.TRIPTYCH_API_KEY ?? "none" });
const { data: models } = await client.models.list();
const model = models[0].id;

// A stream. Leaving the loop early, or stream.abort(), aborts the request in the server.
const stream = client.chat.completions.stream({
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
}
const { total_tokens } = await stream.totalUsage();
console.log(`\ntotal tokens: ${total_tokens}`);

// A tool that the model has to call: its arguments fit the schema.
const called = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  temperature: 0,
  max_tokens: 64,
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        description: "Tells the weather of a city.",
        parameters: {
          type: "object",
          properties: { city: { type: "string", maxLength: 20 } },
          required: ["city"],
          additionalProperties: false,
        },
      },
    },
  ],
  tool_choice: "required",
});
const call = called.choices[0].message.tool_calls[0].function;
console.log(`calls: ${call.name} ${JSON.stringify(JSON.parse(call.arguments))}`);

// An answer in the form of a schema.
const formed = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "Is Paris in France?" }],
  temperature: 0,
  max_tokens: 64,
  response_format: {
    type: "json_schema",
    json_schema: {
      name: "verdict",
      strict: true,
      schema: {
        type: "object",
        properties: { verdict: { enum: ["yes", "no"] } },
        required: ["verdict"],
        additionalProperties: false,
      },
    },
  },
});
console.log(`formed: ${JSON.stringify(JSON.parse(formed.choices[0].message.content))}`);

// An error, with the parameter that is wrong.
try {
  await client.chat.completions.create({ model, messages: [{ role: "user", content: "Hi" }], temperature: 3 });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) {
    throw error;
  }
  console.log(`refused: ${error.status} ${error.param}`);
}
