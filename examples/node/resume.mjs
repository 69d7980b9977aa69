// Streams one answer over connections that may break: node resume.mjs ADDRESS "prompt" [MAX_TOKENS]
//
// After a break the request is sent again with the seed and the tokens that have come (`emitted`), so that the answer
// goes on where it stopped. Any frontend can do that, not only the one that began.

import { setTimeout as sleep } from "node:timers/promises";

import { connect, retryDelayMs, run, status } from "./triptych.mjs";

const DEADLINE_MS = 120_000;
const RETRIABLE = new Set([status.UNAVAILABLE, status.ABORTED, status.RESOURCE_EXHAUSTED]);
const MAX_TRIES = 5;
const FIRST_DELAY_MS = 200;

async function generate(address, prompt, maxTokens) {
  const deadline = Date.now() + DEADLINE_MS;
  const generation = {
    chat: { messages: [{ role: "user", parts: [{ text: prompt }] }] },
    sampling: { temperature: 0.8 },
    length: maxTokens ? { max_tokens: maxTokens } : {},
  };
  const tokenIds = [];
  for (let numTries = 1; ; numTries++) {
    const client = connect(address);
    try {
      for await (const { event, admitted, output } of client.StreamGenerate({ generation }, { deadline })) {
        if (event === "admitted") {
          generation.sampling.seed = admitted.seed;
          numTries = 1; // only tries in a row are counted
        } else if (event === "output") {
          tokenIds.push(...output.token_ids);
          process.stdout.write(output.text);
        }
      }
      console.log(`\n${tokenIds.length} tokens, seed ${generation.sampling.seed}`);
      return;
    } catch (error) {
      if (!RETRIABLE.has(error.code) || numTries === MAX_TRIES) {
        throw error;
      }
      console.error(`${status[error.code]} after ${tokenIds.length} tokens; trying again`);
      await sleep(retryDelayMs(error) ?? FIRST_DELAY_MS * 2 ** (numTries - 1));
      if (tokenIds.length > 0) {
        generation.emitted = [{ index: 0, token_ids: tokenIds }];
      }
    } finally {
      client.close();
    }
  }
}

const [address, prompt, maxTokens = "0", ...rest] = process.argv.slice(2);
if (prompt === undefined || rest.length > 0) {
  console.error('usage: node resume.mjs ADDRESS "prompt" [MAX_TOKENS]');
  process.exit(2);
}
await run(() => generate(address, prompt, Number(maxTokens)));
