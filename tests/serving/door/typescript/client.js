// OpenAI's SDK against the server at BASE_URL: streams, calls tools, parses, sees errors.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "k", maxRetries: 0 });
const asked = {
  model: "emulated",
  messages: [{ role: "user", content: "Which?" }],
  documents: ["a", "b"].map((id) => ({ id, text: `${id} says: ${id.repeat(200)}` })),
};
const create = (more) => client.chat.completions.create({ ...asked, ...more });
const said = { text: "" };

const plain = await create({});
said.plain = plain.choices[0].message.content;
for await (const piece of await create({ stream: true, ctxreuse: true })) {
  said.text += piece.choices[0]?.delta?.content ?? "";
  said.plan = piece.ctxreuse ?? said.plan;
}
const tool = { type: "function", function: { name: "look_up", parameters: { type: "object" } } };
said.call = (await create({ tools: [tool] })).choices[0].message.tool_calls[0].function.name;
const schema = { name: "city", schema: { type: "object" } };
const parsed = await create({ response_format: { type: "json_schema", json_schema: schema } });
said.parsed = JSON.parse(parsed.choices[0].message.content);
said.models = (await client.models.list()).data.map((one) => one.id);
try {
  await create({ documents: 3 });
} catch (error) {
  said.error = [error.constructor.name, error.status, error.type];
}
console.log(JSON.stringify(said));
