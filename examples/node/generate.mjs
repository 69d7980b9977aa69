// Streams one answer from a Triptych server: node generate.mjs ADDRESS "prompt" [TEMPERATURE]

import { connect, run, status } from "./triptych.mjs";

const DEADLINE_MS = 120_000;

async function generate(address, prompt, temperature) {
  const client = connect(address);
  const request = {
    generation: {
      chat: { messages: [{ role: "user", parts: [{ text: prompt }] }] },
      sampling: { temperature },
    },
  };
  const stream = client.StreamGenerate(request, { deadline: Date.now() + DEADLINE_MS });
  // Cancelling aborts the request in the server. Whoever leaves the loop early must do so, too.
  process.once("SIGINT", () => stream.cancel());
  try {
    // Events of other kinds are ignored: later versions add some.
    for await (const { event, output, finished } of stream) {
      if (event === "output") {
        process.stdout.write(output.text);
      } else if (event === "finished") {
        const { num_prompt_tokens, num_output_tokens, num_cached_tokens } = finished.usage;
        console.log(
          `\nusage: ${num_prompt_tokens} prompt tokens (${num_cached_tokens} cached), ${num_output_tokens} output tokens`,
        );
      }
    }
  } catch (error) {
    if (error.code !== status.CANCELLED) {
      throw error;
    }
    console.log("\ncancelled");
  } finally {
    client.close();
  }
}

const [address, prompt, temperature = "0", ...rest] = process.argv.slice(2);
if (prompt === undefined || rest.length > 0) {
  console.error('usage: node generate.mjs ADDRESS "prompt" [TEMPERATURE]');
  process.exit(2);
}
await run(() => generate(address, prompt, Number(temperature)));
