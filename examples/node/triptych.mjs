// What the examples share: the services out of protos/, and the details of errors. Nothing here is generated.

import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

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

export function connect(address) {
  return new GenerationService(address, grpc.credentials.createInsecure());
}

// The messages of google.rpc in an error's status, by their types' names.
function details(error) {
  const found = {};
  for (const bytes of error.metadata.get("grpc-status-details-bin")) {
    for (const { type_url, value } of definition["google.rpc.Status"].deserialize(bytes).details) {
      const type = type_url.split("/").pop();
      found[type] = definition[type].deserialize(value);
    }
  }
  return found;
}

// The status, the machine-readable reason, and each field that is wrong.
function describe(error) {
  const { "google.rpc.ErrorInfo": info, "google.rpc.BadRequest": request } = details(error);
  return [
    `${grpc.status[error.code]}: ${error.details}`,
    ...(info ? [`  reason: ${info.reason} (${info.domain})`] : []),
    ...(request?.field_violations ?? []).map(({ field, description }) => `  ${field}: ${description}`),
  ].join("\n");
}

// How long the server asks to wait before another try, in ms; null if it does not.
export function retryDelayMs(error) {
  const delay = details(error)["google.rpc.RetryInfo"]?.retry_delay;
  return delay ? Number(delay.seconds) * 1000 + delay.nanos / 1e6 : null;
}

// Runs a program; an error of gRPC ends it with status 1 and is told.
export async function run(main) {
  try {
    await main();
  } catch (error) {
    if (!(error.metadata instanceof grpc.Metadata)) {
      throw error; // no gRPC status, so a bug of the program
    }
    console.error(describe(error));
    process.exitCode = 1;
  }
}

export const { status } = grpc;
