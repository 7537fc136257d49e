// An agent on the `openai` package for Node.js. Nothing in it knows ajet.
//
//   ajet run --task product/17x25 --repeat 8 --parallel 4 -- node integrations/with_openai_node.mjs 17 25
//
// The client finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code becomes the reward.
import OpenAI from "openai";

const [a, b] = process.argv.slice(2).map(Number);

const multiply = {
  type: "function",
  function: {
    name: "multiply",
    description: "Multiply two numbers.",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
    parse: JSON.parse,
    function: ({ a, b }) => String(a * b),
  },
};

const runner = new OpenAI().chat.completions.runTools({
  model: "policy",
  messages: [
    { role: "system", content: "Use your tool, then answer with the number." },
    { role: "user", content: `What is ${a} * ${b}?` },
  ],
  tools: [multiply],
});
const answer = await runner.finalContent();
console.log(answer);
process.exitCode = answer?.includes(String(a * b)) ? 0 : 1;
