// Qwen Code, run once without a terminal.
import { spawnSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const [baseUrl] = process.argv.slice(2);
const program = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "qwen");
const options = ["--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", baseUrl, "--model", "m"];
const ended = spawnSync(program, [...options, "--yolo", "Add 17 and 25 in the file sum."], {
  stdio: ["ignore", "inherit", "inherit"],
  env: { ...process.env, QWEN_CODE_MAX_OUTPUT_TOKENS: "4000" },
});
process.exit(ended.status ?? 1);
