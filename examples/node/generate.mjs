// Streams one answer from a Triptych server: node generate.mjs ADDRESS "prompt" [TEMPERATURE]

import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const DEADLINE_MS = 120_000;
const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));

// Names as in the protos, enums by name, 64-bit integers as exact decimal strings.
const definition = protoLoader.loadSync(["triptych/v1/generation.proto", "google/rpc/error_details.proto"], {
  includeDirs: [PROTOS],
  keepCase: true,
  enums: String,
  longs: String,
  defaults: true,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).triptych.v1;

async function generate(address, prompt, temperature) {
  const client = new GenerationService(address, grpc.credentials.createInsecure());
  const request = {
    generation: {
      chat: { messages: [{ role: "user", parts: [{ text: prompt }] }] },
      sampling: { temperature },
    },
  };
  try {
    // Leaving this loop early must call stream.cancel(), which aborts the request in the server.
    const stream = client.StreamGenerate(request, { deadline: Date.now() + DEADLINE_MS });
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
  } finally {
    client.close();
  }
}

// The status, the machine-readable reason, and each field that is wrong.
function describe(error) {
  const lines = [`${grpc.status[error.code]}: ${error.details}`];
  for (const bytes of error.metadata.get("grpc-status-details-bin")) {
    for (const { type_url, value } of definition["google.rpc.Status"].deserialize(bytes).details) {
      const type = type_url.split("/").pop();
      if (type === "google.rpc.ErrorInfo") {
        const { reason, domain } = definition[type].deserialize(value);
        lines.push(`  reason: ${reason} (${domain})`);
      } else if (type === "google.rpc.BadRequest") {
        for (const { field, description } of definition[type].deserialize(value).field_violations) {
          lines.push(`  ${field}: ${description}`);
        }
      }
    }
  }
  return lines.join("\n");
}

const [address, prompt, temperature = "0", ...rest] = process.argv.slice(2);
if (prompt === undefined || rest.length > 0) {
  console.error('usage: node generate.mjs ADDRESS "prompt" [TEMPERATURE]');
  process.exit(2);
}
try {
  await generate(address, prompt, Number(temperature));
} catch (error) {
  if (!(error.metadata instanceof grpc.Metadata)) {
    throw error; // no gRPC status, so a bug of this program
  }
  console.error(describe(error));
  process.exitCode = 1;
}
